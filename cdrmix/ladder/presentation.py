"""A forecast as text, as JSON and as a picture."""

from __future__ import annotations

import textwrap
from typing import Any

from cdrmix.errors import ConfigError
from cdrmix.ladder.forecast import Forecast
from cdrmix.ladder.verdict import Outcome
from cdrmix.report.plots import LIGHT, Palette
from cdrmix.report.plots_ladder import ForecastRung, MeasuredRung, draw_forecast

MEANING = {
    Outcome.PASS: "the measured loss is inside of the band",
    Outcome.FAIL: "the measured loss is above the band: do not train a larger rung before the reason is known",
    Outcome.HOLD: "the measured loss is below the band: look for held-out text in the training text, or another text",
    Outcome.NOT_MEASURED: "too few rungs for a forecast",
}

WIDTH = 100


def wrapped(text: str) -> str:
    """A sentence on lines of at most WIDTH columns, unless a word is longer; the lines after the first are indented."""
    return "\n".join(textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False))


def forecast_text(forecast: Forecast) -> str:
    """The rungs, the forecast, the band and the verdict, on lines of at most 120 columns."""
    width = max(len(name) for name in ("rung", forecast.name, *(rung.name for rung in forecast.rungs)))
    lines = [f"{'rung':<{width}}  {'FLOP':>9}  {'loss':>8}  seeds  fitted"]
    for rung in forecast.rungs:
        fitted = "yes" if forecast.at is not None and rung in forecast.used else "no"
        lines.append(f"{rung.name:<{width}}  {rung.compute:>9.2e}  {rung.loss:>8.4f}  {len(rung.losses):>5}  {fitted}")
    if forecast.at is not None:
        at, law = forecast.at, forecast.law
        lines += [
            "",
            f"forecast of {forecast.name}, {at.compute:.2e} FLOP: {at.loss:.4f}, band {at.low:.4f} to {at.high:.4f}",
        ]
        lines.append(
            f"  E + A C^-{law.exponent}, band over exponents of {law.exponents[0]} to {law.exponents[1]}, "
            f"{100 * law.slack:g}% on both sides"
            + (f", and {forecast.deviation:.2%} of the seeds" if forecast.deviation else "")
        )
    if forecast.measured is not None:
        error = f", {forecast.measured / forecast.at.loss - 1:+.2%} of the forecast" if forecast.at is not None else ""
        lines.append(f"measured: {forecast.measured:.4f}{error}")
    if forecast.verdict is not None:
        lines.append(f"{forecast.verdict}: {MEANING[forecast.verdict]}")
    return "\n".join([*lines, *(wrapped(f"note: {note}") for note in forecast.notes)])


def forecast_json(forecast: Forecast) -> dict[str, Any]:
    """The forecast as plain data. loss, low, high are null with too few rungs; verdict without a measured loss."""
    at = forecast.at
    return {
        "rung": forecast.name,
        "compute": None if at is None else at.compute,
        "loss": None if at is None else at.loss,
        "low": None if at is None else at.low,
        "high": None if at is None else at.high,
        "measured": forecast.measured,
        "verdict": None if forecast.verdict is None else forecast.verdict.value,
        "exponent": forecast.law.exponent,
        "exponents": list(forecast.law.exponents),
        "slack": forecast.law.slack,
        "seed_deviation": forecast.deviation,
        "rungs": [
            {"name": rung.name, "compute": rung.compute, "losses": list(rung.losses), "fitted": rung in forecast.used}
            for rung in forecast.rungs
        ],
        "notes": list(forecast.notes),
    }


def forecast_picture(forecast: Forecast, palette: Palette = LIGHT) -> bytes:
    """The picture, a PNG. Raises ConfigError with too few rungs."""
    at = forecast.at
    if at is None:
        raise ConfigError(f"there is no picture of {forecast.name}: {'; '.join(forecast.notes)}")
    verdict = "forecast" if forecast.verdict is None else forecast.verdict.value
    return draw_forecast(
        [MeasuredRung(rung.name, rung.compute, rung.losses, rung in forecast.used) for rung in forecast.rungs],
        [(point.compute, point.loss, point.low, point.high) for point in forecast.curve()],
        ForecastRung(
            forecast.name,
            at.compute,
            at.loss,
            at.low,
            at.high,
            forecast.measured,
            f"{verdict}, band {at.low:.3f} to {at.high:.3f}",
        ),
        title=f"Forecast of {forecast.name}",
        palette=palette,
    )
