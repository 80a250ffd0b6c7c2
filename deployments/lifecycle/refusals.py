"""Why a change of models is not made, as errors: a bundle does not serve, there is no room or no time, or another one runs."""

from dpiframe_core.errors import DPIFrameError


class Conflict(DPIFrameError):
    """What is asked does not go with what there is: another change is under way, or the version is another bundle's."""

    status = 409
    code = "conflict"


class LoadFailed(DPIFrameError):
    """A replica could not load the version, or its golden rows did not come out. Nothing has changed."""

    status = 422
    code = "load_failed"


class LoadTimeout(DPIFrameError):
    """Not every replica was ready in time. Nothing has changed."""

    status = 504
    code = "load_timeout"
