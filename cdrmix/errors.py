"""The exceptions for failures that a user can correct, each with its exit code."""

from __future__ import annotations

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
UNEXPECTED = 70  # sysexits.h EX_SOFTWARE: exit code of any other exception, a defect of cdrmix or of the device


class CdrmixError(Exception):
    """A failure with a message for the user. The process ends with `exit_code`."""

    exit_code = 1


class CdrmixWarning(UserWarning):
    """Something that a user should know but that does not prevent the work."""


class ConfigError(CdrmixError, ValueError):
    """The configuration or the command line is wrong, or the configuration does not fit the machine."""

    exit_code = 2


class CorpusError(CdrmixError, ValueError):
    """The text is missing, is empty, or has more malformed records than the configured limit."""

    exit_code = 3


class ShardError(CdrmixError, ValueError):
    """Prepared shards are damaged, or belong to another configuration or another text than the run."""

    exit_code = 4


class CheckpointError(CdrmixError, ValueError):
    """The path has no complete checkpoint or exported model."""

    exit_code = 5


class LedgerError(CheckpointError):
    """The ledger of a ladder, or a file that it records, was changed, cut or removed."""


class DiskFullError(CdrmixError, OSError):
    """The disk is full. Existing checkpoints are not affected."""

    exit_code = 6


class VocabularyError(CdrmixError, ValueError):
    """The tokenizer, the shards and the model do not have the same vocabulary."""

    exit_code = 7


class OutOfMemoryError(CdrmixError, RuntimeError):
    """Memory is exhausted. For a step of the training the message names the keys that reduce its memory."""

    exit_code = 8


class NonFiniteLossError(CdrmixError, ArithmeticError):
    """The loss or the gradient norm is NaN or infinite. The update was not applied."""

    exit_code = 9


class NonFiniteLogitsError(NonFiniteLossError, ValueError):
    """The logits of a router are NaN (the message names the layer), or those from which a token is to be chosen.

    Training ends as for a loss that is NaN.
    """


class ExportMismatchError(CdrmixError, RuntimeError):
    """An exported model that was read back does not give the same logits as the original."""

    exit_code = 10


class MemoryLogError(CdrmixError, ValueError):
    """The log of an episodic memory is damaged, belongs to another model, or is open in another process."""

    exit_code = 11


class PluginError(CdrmixError, RuntimeError):
    """A plugin (an entry point of the group cdrmix.plugins) cannot be loaded."""

    exit_code = 12


class BaseModelError(CheckpointError):
    """Adapters (LoRA) belong to another base model than the one that is there, or it is missing."""

    exit_code = 13


class GateError(CdrmixError):
    """A required gate failed."""

    exit_code = 14


class UndecidedGateError(CdrmixError):
    """A required gate is undecided, or its figure was not measured."""

    exit_code = 15


class HangError(CdrmixError):
    """A step took far longer than steps do, because a process or a device hangs. The process has ended itself."""

    exit_code = 16


class Preempted(CdrmixError):
    """A signal stopped the training after a checkpoint was written. `--resume auto` continues the run."""

    exit_code = 75  # sysexits.h EX_TEMPFAIL: try again later
