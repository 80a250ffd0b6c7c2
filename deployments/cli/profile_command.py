"""What `dpiframe profile` does: a bundle in, the timeline of one request out as JSON and as a picture."""

import json
import os
from pathlib import Path

from deployments.offline.output_file import check_outfile, write_outfile


def write_profile(bundle: Path, rows: int, out: Path, plot: Path | None, device: str, precision: str | None) -> str:
    """Writes the files, and says in a few lines what they show.

    Raises:
        InputError: a file that cannot be written, or as `profile_bundle`.
    """
    check_outfile("--out", out)
    if plot is not None:
        check_outfile("--plot", plot, ".png", ".svg", ".pdf")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is imported: its profiler reports its own start and stop

    from dpiframe_core.bundle.bundle import read_bundle
    from dpiframe_core.describe.profile import profile_bundle
    from dpiframe_core.describe.trace import describe

    trace = profile_bundle(read_bundle(bundle), rows, device, precision)
    write_outfile("--out", out, json.dumps(trace.chrome(), indent=1))
    written = [f"written: {out} (open it in ui.perfetto.dev)"]
    if plot is not None:
        from dpiframe_core.describe.timeline_plot import plot_trace

        plot_trace(trace, plot)
        written.append(f"drawn: {plot}")
    return "\n".join([describe(trace), *written])
