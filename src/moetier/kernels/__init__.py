"""The kernels of a routed-expert layer, which equal the contract's oracle bit for bit."""

from moetier.errors import NotBuiltError


def isas_here() -> tuple[str, ...]:
    """Return the CPU's kernel sets that run here, best first; none in an installation without the extension."""
    try:
        from moetier.kernels.cpu.isa import available_isas
    except NotBuiltError:
        return ()
    return available_isas()
