"""Plugins: installed packages that register mixers, feed-forwards, optimizers, sources, tasks and other entries.

A package declares an entry point in the group `cdrmix.plugins`. Its value names a module or a function:

    [project.entry-points."cdrmix.plugins"]
    my-plugin = "my_package.cdrmix_plugin"

cdrmix imports the module, or imports and calls the function without arguments, before it validates a configuration or
looks up a name that it does not know.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from types import ModuleType

from cdrmix.errors import PluginError

GROUP = "cdrmix.plugins"

_loaded: dict[str, list[str]] = {}  # group -> its plugins, once they are loaded


def load_plugins() -> list[str]:
    """Loads every plugin once per process, sorted by distribution and name. Returns their names.

    Raises:
        PluginError: if a plugin cannot be imported or its function raises. It names the distribution and the entry.
    """
    if GROUP not in _loaded:
        _loaded[GROUP] = []  # set first: a plugin may look up registered names while it is loaded
        try:
            for entry in sorted(entry_points(group=GROUP), key=lambda entry: (_distribution(entry), entry.name)):
                _load(entry)
                _loaded[GROUP].append(entry.name)
        except PluginError:
            del _loaded[GROUP]
            raise
    return _loaded[GROUP]


def _distribution(entry: EntryPoint) -> str:
    """Name and version of the distribution that declares the entry."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "(unknown)"


def _load(entry: EntryPoint) -> None:
    where = f"the plugin {entry.name!r} = {entry.value!r} of the distribution {_distribution(entry)}"
    remedy = "Correct or uninstall that distribution"
    try:
        plugin = entry.load()
        if not isinstance(plugin, ModuleType) and callable(plugin):
            plugin()
            return
    except Exception as error:
        raise PluginError(f"{where} failed with {type(error).__name__}: {error}. {remedy}") from error
    if not isinstance(plugin, ModuleType):
        raise PluginError(f"{where} is neither a module nor a function, but {type(plugin).__name__}. {remedy}")
