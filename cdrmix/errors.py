"""What can go wrong for a user, and the exit code that each kind of failure has."""

from __future__ import annotations


class CdrmixError(Exception):
    """A failure with a message for the person at the console; `exit_code` is the process's status."""

    exit_code = 1


class ConfigError(CdrmixError, ValueError):
    """The configuration (or the command line) asks for something that is not allowed."""

    exit_code = 2


class CorpusError(CdrmixError, ValueError):
    """The text to train on is missing, empty or malformed beyond the configured limit."""

    exit_code = 3


class ShardError(CdrmixError, ValueError):
    """Tokenised shards are corrupt, truncated, or not made by this configuration or of the text a run began with."""

    exit_code = 4


class CheckpointError(CdrmixError, ValueError):
    """No whole checkpoint, or no whole exported model, can be read from the place named."""

    exit_code = 5


class DiskFullError(CdrmixError, OSError):
    """The disk filled up; the last good checkpoint is untouched."""

    exit_code = 6


class VocabularyError(CdrmixError, ValueError):
    """Tokenizer, shards and model disagree about the vocabulary."""

    exit_code = 7


class OutOfMemoryError(CdrmixError, RuntimeError):
    """The device's memory does not hold the step; the message names the keys that shrink it."""

    exit_code = 8


class NonFiniteLossError(CdrmixError, ArithmeticError):
    """The loss or the gradient norm became NaN or infinite before the update was applied."""

    exit_code = 9


class NonFiniteLogitsError(NonFiniteLossError, ValueError):
    """A router's logits are NaN; the message names the layer. Training ends as for a loss that is NaN."""


class ExportMismatchError(CdrmixError, RuntimeError):
    """An exported model, read back, does not give the logits of the model it was made from."""

    exit_code = 10


class MemoryLogError(CdrmixError, ValueError):
    """The log of a run's episodic memory is damaged, of another model, or open in another process."""

    exit_code = 11


class PluginError(CdrmixError, RuntimeError):
    """A plugin (an entry point of the group cdrmix.plugins) cannot be loaded."""

    exit_code = 12


class Preempted(CdrmixError):
    """SIGTERM or SIGINT arrived; a checkpoint was written and `--resume auto` continues the run."""

    exit_code = 75  # sysexits.h EX_TEMPFAIL: try again later
