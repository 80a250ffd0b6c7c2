"""What a deployment says of where a model's tables lie."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from dpiframe_core.strict import Strict

Place = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]  # of files; with a NUL in it none is found


class RemoteTables(Strict):
    """Processes on any nodes of the cluster that answer for rows of files, in the place of each replica's own disk.

    Rows are cut into `shards`, each with so many `replicas`; `resource`, if given, is one that Ray's nodes for them have.
    `timeout_ms`: for each step of an answer; then its rows count as not there.
    """

    shards: Annotated[int, Field(ge=1, le=64)]
    replicas: Annotated[int, Field(ge=1, le=16)] = 1
    cpus_per_shard: Annotated[float, Field(gt=0)] = 1
    resource: Annotated[str, Field(min_length=1)] | None = None
    timeout_ms: Annotated[float, Field(gt=0)] = 1000


class TablesHome(Strict):
    """Where the rows of a model's tables lie that a GPU's memory is not to hold whole. A CPU reads all in the bundle's files.

    `hbm_gib` of a GPU's memory hold the rows read most, taken to be those of the least ids; or `placement` is a directory that
    `dpiframe plan` wrote. The other rows lie in host memory: in `host_folder`, one copy for all replicas of a host; null: in
    each replica's own. Beyond `host_gib` of it they lie in the bundle's files alone, and are read into `ahead_mib` of memory
    before a request waits for a batch. A request waits for them `miss_budget_ms` at most, if that is given; for rows that are
    late it then reads those of unknown values, and the answer says how many. With `remote` others read them in files.

    Every `replan_s` seconds rows that are read often by now, those of files too, come into each GPU's memory in the place of
    others, `replan_mib` of them at most; null: never. Host memory then holds a copy of the GPU's rows, beside `host_gib`. Other
    rows of files keep their places in `ahead_mib` while they are asked for; on a CPU that is all.
    """

    hbm_gib: Annotated[float, Field(gt=0)] | None = None
    placement: Place | None = None
    host_folder: Annotated[str, Field(pattern="^/")] | None = "/dev/shm"
    host_gib: Annotated[float, Field(ge=0)] | None = None
    ahead_mib: Annotated[float, Field(gt=0)] = 256
    miss_budget_ms: Annotated[float, Field(ge=0)] | None = None
    remote: RemoteTables | None = None
    replan_s: Annotated[float, Field(ge=1)] | None = None
    replan_mib: Annotated[float, Field(gt=0)] = 64

    @model_validator(mode="after")
    def _one_way_to_place(self) -> Self:
        if (self.hbm_gib is None) == (self.placement is None):
            got = "neither it nor" if self.hbm_gib is None else "both it and"
            raise ValueError(f"hbm_gib: got {got} placement, expected one of the two")
        if self.host_gib is not None and self.placement is not None:
            raise ValueError("host_gib: got a number beside placement, which says itself what the host holds")
        if self.remote is not None and self.host_gib is None and self.placement is None:
            raise ValueError("remote: got shards without host_gib or placement, expected one, as no row lies in files")
        return self
