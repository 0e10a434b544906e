"""The errors that a person caused or can remedy; everything else is a bug and keeps its traceback."""

from __future__ import annotations

from moetier.visible import bounded, visible


class MoetierError(Exception):
    """Something that the user can put right. The text says what was expected, what was found and what to do.

    The command line prints it in one piece and exits with `exit_code`. Its text may be shown anywhere: what files,
    servers and names brought into it is made visible.
    """

    exit_code = 2

    def __str__(self) -> str:
        return bounded(visible(super().__str__()))


class CheckpointError(MoetierError):
    """A checkpoint cannot be read, or is not one that we can build a store from."""


class DamagedWeightsError(CheckpointError):
    """Values of a checkpoint cannot be right: what was built from it before is of no use either."""


class StoreError(MoetierError):
    """A store cannot be opened, does not fit its checkpoint, or holds bad bytes."""


class SettingsError(MoetierError):
    """A setting is unknown, malformed, or cannot be met on this machine."""


class UnsupportedModelError(MoetierError):
    """The model needs arithmetic that the contract does not define; serving it would be wrong."""


class RefusedError(CheckpointError, UnsupportedModelError):
    """moetier does not serve this checkpoint, or not here, by the table in `moetier.decision.rows`."""


class NotBuiltError(MoetierError, ImportError):
    """The compiled kernels are not in this installation: it can plan, but neither build, measure nor serve."""


class RecordReadError(StoreError):
    """A record could not be read from disk with the right checksum, and not healed: the engine must stop."""

    exit_code = 1
