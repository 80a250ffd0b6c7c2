# CUDA 13 runtime, Python 3.12. Build: docker build -t dpiframe:0.1.0 .
# gcc and Python's headers: Triton builds launchers with them when a model warms up, and so is the CPU's lookup built.
# Run configs/gpu.yaml, with the file of who may ask in ./access (docs/security.md):
#   docker run --gpus all -p 8000:8000 -v $PWD/models:/opt/dpiframe/models:ro -v $PWD/access:/etc/dpiframe:ro dpiframe:0.1.0
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

RUN apt-get update \
    && apt-get install -y --no-install-recommends python3.12 python3.12-venv python3.12-dev gcc libc6-dev tini wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 dpiframe

ENV VIRTUAL_ENV=/opt/dpiframe/.venv \
    PATH=/opt/dpiframe/.venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    RAY_SERVE_ENABLE_HA_PROXY=1 \
    RAY_SERVE_THROUGHPUT_OPTIMIZED=1 \
    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deployments.front.middlewares \
    RAY_preload_python_modules=deployments.worker_start \
    RAY_SERVE_HAPROXY_METRICS_ENABLED=0 \
    RAY_SERVE_HAPROXY_LOG_TARGET="127.0.0.1:514 local0 alert #" \
    RAY_USAGE_STATS_ENABLED=0

WORKDIR /opt/dpiframe
RUN python3.12 -m venv .venv && pip install torch==2.13.0

COPY pyproject.toml README.md LICENSE ./
COPY kernels kernels
COPY dpiframe_core dpiframe_core
COPY deployments deployments
COPY configs configs
# Editable, as in the repository: the package name `kernels` is also another project's, and this one must be the one found.
RUN pip install -e '.[gpu,tracing]'

USER dpiframe
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s CMD wget -qO- http://127.0.0.1:8000/-/healthz || exit 1
ENTRYPOINT ["tini", "--", "dpiframe"]
CMD ["serve", "--config", "configs/gpu.yaml"]
