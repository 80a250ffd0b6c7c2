"""What a deployment says of what it tells about itself, and keeps of single requests: traces that it sends, scored rows that it
writes. Both are off unless they are asked for.
"""

from typing import Annotated

from pydantic import Field

from dpiframe_core.strict import Strict


class Metrics(Strict):
    """Ray's Prometheus endpoint of each node, on all interfaces: null has the launcher take a free port at each start.

    On a cluster that runs before, the port is Ray's (`ray start --metrics-export-port`), and the one given here must be that.
    """

    port: Annotated[int, Field(ge=1, le=65535)] | None = None


class Tracing(Strict):
    """OpenTelemetry spans, sent to `endpoint` by OTLP over HTTP.

    `sample` is the share of requests that are traced where they bring no `traceparent`; one that does says so itself.
    """

    endpoint: Annotated[str, Field(pattern=r"^https?://[^\s/?#]+/[^\s]*$")]
    sample: Annotated[float, Field(ge=0, le=1)] = 0.01


class ScoreLog(Strict):
    """Rows of raw feature values and their scores, as Parquet files below `folder`.

    `sample` is the share of requests. All files of a host's replicas together take at most `max_mb`: the oldest go first. A
    replica writes a file when it has `file_rows`, or `every_s` after the last one.
    """

    folder: Annotated[str, Field(min_length=1)]
    sample: Annotated[float, Field(gt=0, le=1)] = 0.001
    max_mb: Annotated[int, Field(ge=1)] = 1024
    file_rows: Annotated[int, Field(ge=1, le=1_000_000)] = 65536
    every_s: Annotated[float, Field(ge=1, le=86_400)] = 60
