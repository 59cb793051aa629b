"""DPO: its loss is TRL's, its gradient that of all logits, its reference is made once, resumed runs are the same."""

from __future__ import annotations

import importlib
import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from json_rows import read_metrics
from torch import Tensor

from cdrmix.config.schema import Config
from cdrmix.config.schema_training import Dpo
from cdrmix.data.batch import Batch
from cdrmix.data.pairs import PairBatch, PairLoader, all_pairs, make_pair_batch
from cdrmix.data.prepare import prepare
from cdrmix.data.shards import ShardSet
from cdrmix.errors import CheckpointError, ConfigError, VocabularyError
from cdrmix.inference.checkpoints import newest_whole_checkpoint, read_weights
from cdrmix.inference.load import load_model
from cdrmix.model.loss import LossModel
from cdrmix.run_folder import RunFolder
from cdrmix.training import engine as engine_module
from cdrmix.training import stage_a
from cdrmix.training.build import build_loss_model
from cdrmix.training.console import Console
from cdrmix.training.preferences import MEASURES, log_probs, preference_loss
from cdrmix.training.stage_a import TrainResult, train

pytestmark = pytest.mark.usefixtures("own_settings")

WORDS = ("the", "loop", "reads", "rows", "adds", "gradients", "clips", "steps", "and", "forgets", "them", "again")


def log_probabilities(pairs: int = 6) -> tuple[Tensor, Tensor]:
    """float64 [pairs, 2]: of a policy and of a reference, far enough apart that both signs of the margin occur."""
    generator = torch.Generator().manual_seed(5)
    policy = -20 + 6 * torch.randn(pairs, 2, generator=generator, dtype=torch.float64)
    return policy, policy + 9 * torch.randn(pairs, 2, generator=generator, dtype=torch.float64)


@pytest.mark.gate
def test_equals_trl() -> None:
    trainer = importlib.import_module("trl.trainer.dpo_trainer")  # a second, and transformers
    policy, reference = log_probabilities()
    ours = policy.clone().requires_grad_()
    terms = preference_loss(ours, reference, Dpo(beta=0.3))
    (gradient,) = torch.autograd.grad(terms.loss / len(policy), ours)
    theirs = policy.clone().requires_grad_()
    loss, metrics = trl_loss(trainer.DPOTrainer, theirs, reference, 0.3)
    (exact,) = torch.autograd.grad(loss, theirs)
    torch.testing.assert_close(terms.loss / len(policy), loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradient, exact, rtol=1e-12, atol=1e-14)
    assert 0 < terms.accuracy < len(policy)
    for name, key in {
        "accuracy": "rewards/accuracies",
        "margin": "rewards/margins",
        "chosen_reward": "rewards/chosen",
        "rejected_reward": "rewards/rejected",
    }.items():
        assert getattr(terms, name).item() / len(policy) == pytest.approx(metrics[key][0], rel=1e-6), name


def trl_loss(trainer: Any, policy_P2: Tensor, reference_P2: Tensor, beta: float) -> tuple[Tensor, Any]:
    """DPOTrainer's loss on given log-probabilities, with a trainer that has only the attributes of the formula.

    Every answer is one token after a prompt of one token.
    """
    answers = policy_P2.T.reshape(-1, 1)  # TRL's batch has all chosen answers first
    mask = torch.ones_like(answers, dtype=torch.long)
    nothing = torch.zeros_like(answers)
    outputs = SimpleNamespace(
        log_probs=answers, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool(), log_sum_sq_probs=nothing
    )
    fake = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather=lambda value: value, gather_for_metrics=lambda value: value),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=["sigmoid"],
        loss_weights=[1.0],
        beta=beta,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.zeros(len(answers), 2, dtype=torch.long),
        "attention_mask": torch.ones(len(answers), 2, dtype=torch.long),
        "completion_mask": torch.cat([torch.zeros_like(mask), mask], 1),
        "ref_chosen_logps": reference_P2[:, 0],
        "ref_rejected_logps": reference_P2[:, 1],
    }
    loss = trainer._compute_loss(fake, lambda **_: outputs, inputs, False)
    return loss, fake._metrics["train"]


def test_label_smoothing_by_hand() -> None:
    terms = preference_loss(
        torch.tensor([[-1.0, -3.0]]), torch.tensor([[-2.0, -2.0]]), Dpo(beta=0.5, label_smoothing=0.2)
    )
    margin = torch.tensor(0.5 * (1 - -1))
    assert terms.loss.item() == pytest.approx((-0.8 * F.logsigmoid(margin) - 0.2 * F.logsigmoid(-margin)).item())
    assert (terms.accuracy.item(), terms.margin.item()) == (1, 1.0)


@pytest.fixture(scope="session")
def pair_file(config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny configuration on seventy pairs. The chosen answers repeat the prompt, and the rejected ones do not."""
    folder = tmp_path_factory.mktemp("pairs")
    lines = []
    for number in range(70):
        prompt = f"{WORDS[number % 12]} {WORDS[number * 5 % 11]}"
        lines.append(
            {"prompt": prompt, "chosen": f"now {prompt} {number}", "rejected": " ".join(WORDS[number % 7 :][:3])}
        )
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    content = yaml.safe_load(config_file.read_text())
    content["data"] |= {
        "source": {"kind": "preferences", "paths": [str(folder / "pairs.jsonl")], "template": "chatml"},
        "dedup": {"near_duplicates": False},
        "row_length": 120,
        "cache": str(folder / "cache"),
    }
    content["run"]["root"] = str(folder / "runs")
    content["train"] |= {"dpo": {"beta": 0.3}, "batch_rows": 4, "micro_batch_rows": 2, "learning_rate": 3e-3}
    path = folder / "pairs.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="session")
def pair_config(pair_file: Path) -> Callable[..., Config]:
    return lambda *overrides: Config.from_yaml(pair_file, overrides)


@pytest.fixture(scope="session")
def pairs(pair_config: Callable[..., Config]) -> ShardSet:
    return prepare(pair_config(), say=lambda line: None)


Trainer = Callable[..., tuple[RunFolder, TrainResult]]


@pytest.fixture
def trainer(pair_config: Callable[..., Config], pairs: ShardSet) -> Trainer:
    def run(*overrides: str, folder: RunFolder | None = None) -> tuple[RunFolder, TrainResult]:
        config = pair_config(*overrides)
        resume = None if folder is None else "auto"
        folder = RunFolder.create(config) if folder is None else folder
        return folder, train(config, folder, pairs, resume=resume, console=False)

    return run


def weights(run: RunFolder) -> dict[str, Tensor]:
    newest = newest_whole_checkpoint(run.checkpoints)
    assert newest is not None
    return {name: weight.clone() for name, weight in read_weights(newest).items()}


def test_a_row_has_whole_pairs_as_documents(pairs: ShardSet) -> None:
    split, tokenizer = pairs.train, pairs.tokenizer
    assert split.documents + pairs.valid.documents == 2 * 70
    seen = []
    for batch in all_pairs(split, np.arange(split.rows), 3, 0, 1):
        weights_2PBT = batch.answer_weights()
        flat = batch.targets_BT.flatten()
        borders = set(batch.cu_seqlens_N.tolist())
        assert len(weights_2PBT) == 2 * len(batch.pairs_P)
        assert torch.equal(weights_2PBT.sum(0), batch.weights_BT), "every weight is of one answer"
        for index, pair in enumerate(batch.pairs_P.tolist()):
            seen.append(pair)
            texts = []
            for answer in (2 * index, 2 * index + 1):
                positions = (batch.answers_BT.flatten() == answer).nonzero().flatten()
                assert {int(positions[0]), int(positions[-1]) + 1} <= borders
                assert not borders & set(range(int(positions[0]) + 1, int(positions[-1]) + 1))
                trained = weights_2PBT[answer].flatten() == 1
                assert set(trained.nonzero().flatten().tolist()) <= set(positions.tolist())
                texts.append(tokenizer.decode_with_special_tokens(flat[positions].tolist()))
                answered = tokenizer.decode_with_special_tokens(flat[trained].tolist())
                assert texts[-1].endswith(f"<|im_start|>assistant\n{answered}\n<|endoftext|>")
                assert answered.endswith("<|im_end|>")
            prompts = [text.partition("<|im_start|>assistant")[0] for text in texts]
            assert prompts[0] == prompts[1]
            assert texts[0].count(prompts[0].split("\n")[1].removesuffix("<|im_end|>")) == 2, "the chosen one is first"
    assert sorted(seen) == list(range(split.documents // 2))


def separate_log_prob(model: LossModel, ids: list[int], weights: list[float]) -> Tensor:
    """The log-probability of the weighted tokens of one document, from all its logits."""
    language_model = model.language_model
    hidden = language_model(torch.tensor([ids[:-1]])).hidden_BTD
    log_probs = F.log_softmax(hidden[0] @ language_model.head_weight.T, -1)
    return (log_probs.gather(-1, torch.tensor(ids[1:]).unsqueeze(-1)).squeeze(-1) * torch.tensor(weights)).sum()


def test_log_probabilities_and_gradients_are_those_of_all_logits(
    pair_config: Callable[..., Config], pairs: ShardSet
) -> None:
    """In packed rows by the fused loss, against each document alone with its logits in plain PyTorch."""
    config = pair_config()
    torch.manual_seed(0)
    model = build_loss_model(config).eval()
    batch = make_pair_batch(pairs.train, np.array([0, 1]))
    section = Dpo(beta=0.3)
    expected = []
    ids, targets, weights_BT, answers = (
        x.flatten().tolist() for x in (batch.ids_BT, batch.targets_BT, batch.weights_BT, batch.answers_BT)
    )
    for answer in range(2 * len(batch.pairs_P)):
        positions = [position for position, owner in enumerate(answers) if owner == answer]
        document = [ids[positions[0]], *(targets[position] for position in positions)]
        assert document[0] == pairs.train.end_of_text_id
        expected.append(separate_log_prob(model, document, [weights_BT[position] for position in positions]))
    exact_P2 = torch.stack(expected).view(-1, 2)
    reference_P2 = exact_P2.detach() + torch.randn(exact_P2.shape)
    exact = torch.autograd.grad(preference_loss(exact_P2, reference_P2, section).loss, [*model.parameters()])
    with torch.no_grad():
        torch.testing.assert_close(log_probs(model, batch).float(), exact_P2, rtol=1e-5, atol=1e-4)
    found_P2 = log_probs(model, batch).float()
    found = torch.autograd.grad(preference_loss(found_P2, reference_P2, section).loss, [*model.parameters()])
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()) + 1e-7)


def test_it_learns_the_preference(trainer: Trainer) -> None:
    run, result = trainer("train.steps=24", "train.learning_rate=1e-2", "train.evaluate_every=12")
    rows = read_metrics(run.metrics_jsonl)
    # at the start the policy is the reference
    assert rows[0]["preferences"]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    assert rows[0]["preferences"]["margin"] == pytest.approx(0, abs=1e-4)
    assert rows[-1]["preferences"]["accuracy"] > 0.9
    assert rows[-1]["valid_preferences"]["loss"] == rows[-1]["valid_loss"] < 0.6
    assert rows[-1]["valid_preferences"]["accuracy"] > 0.8
    assert set(rows[-1]["preferences"]) == set(MEASURES)
    for row in rows:
        measures = row["preferences"]
        assert measures["margin"] == pytest.approx(measures["chosen_reward"] - measures["rejected_reward"], abs=1e-5)
    assert result.final_loss == rows[-1]["next_token_loss"] == rows[-1]["preferences"]["loss"]


def test_the_loss_does_not_depend_on_how_a_step_is_cut(trainer: Trainer) -> None:
    plain = ("train.steps=1", "train.warmup_steps=0", "model.feed_forward.load_balance_weight=0.0")
    whole, cut = (
        read_metrics(trainer(*plain, f"train.micro_batch_rows={rows}")[0].metrics_jsonl)[0] for rows in (4, 1)
    )
    assert cut["preferences"]["loss"] == pytest.approx(whole["preferences"]["loss"], rel=1e-5)
    assert cut["gradient_norm"] == pytest.approx(whole["gradient_norm"], rel=1e-3)
    assert cut["tokens"] == whole["tokens"] > 0


class Killed(Exception):
    """Stands for a process that ends without a word."""


def test_a_resumed_run_is_the_same_and_reuses_the_reference(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    straight, expected = trainer()
    runs: list[RunFolder] = []
    create, on_step = RunFolder.create, Console.on_step

    def kill(self: Console, number: int) -> None:
        on_step(self, number)
        if number == 5:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "create", lambda config: runs.append(create(config)) or runs[-1])
        patched.setattr(Console, "on_step", kill)
        with pytest.raises(Killed):
            trainer()
    made: list[int] = []
    make = stage_a.make_reference
    monkeypatch.setattr(stage_a, "make_reference", lambda *each: made.append(1) or make(*each))
    _, found = trainer(folder=runs[0])
    assert not made
    assert found.final_loss == expected.final_loss
    for name, weight in weights(straight).items():
        assert torch.equal(weight, weights(runs[0])[name]), name
    # A damaged reference is made again, from the weights of the start.
    path = runs[0].path / "reference" / "train.npy"
    before = path.read_bytes()
    path.write_bytes(before[:-8] + bytes(8))
    trainer(folder=runs[0])
    assert made == [1]
    assert path.read_bytes() == before
    assert "the reference model are missing or damaged" in runs[0].log.read_text()


def test_a_reference_without_a_checkpoint_is_computed_again(
    trainer: Trainer, pairs: ShardSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the first checkpoint the start is loaded again, and may be another model than when the run was killed."""
    starts = [trainer("train.steps=1", "train.warmup_steps=0", f"run.seed={seed}")[0] for seed in (1, 2)]
    for start in starts:
        start.keep_tokenizer(pairs.tokenizer_path)
    runs: list[RunFolder] = []
    create = RunFolder.create

    def killed(self: Console, number: int) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "create", lambda config: runs.append(create(config)) or runs[-1])
        patched.setattr(Console, "on_step", killed)
        with pytest.raises(Killed):
            trainer(f"train.start_from={starts[0].path}")
    shutil.rmtree(starts[0].path)
    starts[1].path.rename(starts[0].path)
    config = Config.from_yaml(runs[0].config_snapshot)
    train(config, runs[0], pairs, resume="auto", console=False)
    first = read_metrics(runs[0].metrics_jsonl)[0]["preferences"]
    assert first["margin"] == pytest.approx(0, abs=1e-4), "the policy is the reference"


def test_the_documents_of_pairs_are_marked_for_compiled_blocks(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a resumed run compiles other code than an unbroken one."""
    marked: list[Batch] = []
    mark = engine_module.mark_documents
    monkeypatch.setattr("cdrmix.training.build.compile_blocks", lambda model: None)
    monkeypatch.setattr(engine_module, "mark_documents", lambda batch: marked.append(batch) or mark(batch))
    trainer("train.steps=1", "train.warmup_steps=0", "train.compile=true")
    assert len(marked) == 2
    assert all(isinstance(batch, PairBatch) for batch in marked)


def test_training_starts_from_an_earlier_model(
    trainer: Trainer, pair_config: Callable[..., Config], pairs: ShardSet, tmp_path: Path
) -> None:
    first, _ = trainer("train.steps=3")
    first.keep_tokenizer(pairs.tokenizer_path)
    still = ("train.steps=1", "train.warmup_steps=0", "train.learning_rate=1e-12", "run.seed=9")
    second, _ = trainer(*still, f"train.start_from={first.path}")
    for name, weight in weights(first).items():
        torch.testing.assert_close(weights(second)[name], weight, rtol=1e-6, atol=1e-9)
    averaged, _ = trainer(*still, "train.ema_decay=0.9", f"train.start_from={first.path}")
    averaged.keep_tokenizer(pairs.tokenizer_path)
    for name, weight in load_model(averaged.path).weights.items():
        torch.testing.assert_close(weight, weights(first)[name], rtol=1e-5, atol=1e-8)
    with pytest.raises(ConfigError, match=r"train\.start_from=.*nowhere does not exist"):
        trainer(f"train.start_from={tmp_path / 'nowhere'}")
    with pytest.raises(CheckpointError, match=r"train\.start_from: .* does not fit the model"):
        trainer(f"train.start_from={first.path}", "model.d_model=32")
    other = prepare(pair_config("data.tokenizer.train_bytes=2000"), say=lambda line: None)
    config = pair_config(f"train.start_from={first.path}")
    with pytest.raises(VocabularyError, match=r"train\.start_from: .* has another tokenizer"):
        train(config, RunFolder.create(config), other, console=False)


def test_rows_of_a_step_are_those_of_next_token_training(pairs: ShardSet) -> None:
    loaders = [
        PairLoader(pairs.train, row_length=120, batch_rows=4, micro_batch_rows=1, seed=3, rank=rank, world_size=2)
        for rank in (0, 1)
    ]
    batches = [loader.micro_batches(2) for loader in loaders]
    numbers = [batch.pairs_P.tolist() for two in zip(*batches, strict=True) for batch in two]  # type: ignore[attr-defined]
    alone = make_pair_batch(pairs.train, loaders[0].rows(2)).pairs_P.tolist()
    assert [number for some in numbers for number in some] == alone
    assert {batch.pair_count for some in batches for batch in some} == {len(alone)}  # type: ignore[attr-defined]


def test_preferences_and_their_loss_belong_together(pair_config: Callable[..., Config]) -> None:
    with pytest.raises(ConfigError, match=r"train\.dpo: .*\n.*a section, because the sources are preferences"):
        pair_config("train.dpo=null")
    with pytest.raises(ConfigError, match=r"train\.dpo: .*\n.*sources of the kinds preferences"):
        pair_config("data.source={kind: stdlib}")


def test_the_best_of_the_held_out_pairs_is_marked_if_it_is_asked_for(
    trainer: Trainer, pair_config: Callable[..., Config]
) -> None:
    run, _ = trainer("train.steps=4", "train.evaluate_every=2", "train.best_metric=margin")
    figures = {row["step"]: row["valid_preferences"].get("margin") for row in read_metrics(run.metrics_jsonl)}
    measured = {step: figure for step, figure in figures.items() if figure is not None}
    best = max(measured, key=lambda step: measured[step])
    assert (run.checkpoints / "best").read_text() == f"step-{best:08d}\n"
    with pytest.raises(ConfigError, match=r"the held-out pairs .* have: loss, accuracy, margin"):
        pair_config("train.best_metric=bits_per_byte")
    with pytest.raises(ConfigError, match=r"train\.best_mode"):
        pair_config("train.best_mode=min")
