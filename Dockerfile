# Two targets, one for CPUs and one for NVIDIA GPUs:
#   docker build --target cpu  -t raydix:0.1.0-cpu --build-arg TORCH_INDEX=<url of the CPU wheels> .
#   docker build --target cuda -t raydix:0.1.0-cuda .
#   docker run --rm --shm-size 2g -p 127.0.0.1:8000:8000 raydix:0.1.0-cpu      # the embedded model
# Packages are the ones Raydix is tested with (constraints.txt). CUDA comes with torch's wheels, the driver with the
# node; so both targets stand on the same base.

FROM python:3.11.14-slim-bookworm AS base

# The same with a C compiler, for the native CPU kernels.
FROM python:3.11.14-bookworm AS venv
RUN python -m venv /opt/raydix
ENV PATH=/opt/raydix/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./

# torch first: gigabytes that a change of the sources leaves alone. Without TORCH_INDEX (see pytorch.org, "Get Started")
# the CPU target has CUDA's gigabytes, too.
FROM venv AS torch-cpu
ARG TORCH_INDEX=
RUN pip install torch -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}

FROM venv AS torch-cuda
RUN pip install torch -c constraints.txt

FROM torch-cpu AS build-cpu
COPY . .
RUN pip install . -c constraints.txt

FROM torch-cuda AS build-cuda
COPY . .
RUN pip install '.[gpu]' -c constraints.txt

FROM base AS runtime
# A numeric user, so that Kubernetes can tell it is not root. All that is written goes to /tmp: the root file system
# can be read-only.
RUN groupadd --gid 10001 raydix && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp raydix
ENV PATH=/opt/raydix/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 RAY_USAGE_STATS_ENABLED=0
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000
# Some engine serves. (Kubernetes has probes of its own and ignores this.)
HEALTHCHECK --interval=10s --timeout=9s --start-period=180s --retries=3 \
    CMD ["python", "-m", "deployments.replica.pod", "ready", "ingress"]
CMD ["raydix", "serve", "--host", "0.0.0.0"]

FROM runtime AS cuda
# Not NVIDIA_VISIBLE_DEVICES: pods that ask for no GPU (head, ingress) must see none.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/raydix /opt/raydix

FROM runtime AS cpu
COPY --from=build-cpu /opt/raydix /opt/raydix
