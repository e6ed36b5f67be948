# Two targets, one for CPUs and one for NVIDIA GPUs:
#   docker build --target cpu  -t raydix:0.2.0-cpu --build-arg TORCH_INDEX=<url of the CPU wheels> .
#   docker build --target cuda -t raydix:0.2.0-cuda .
#   docker run --rm --shm-size 2g -p 127.0.0.1:8000:8000 raydix:0.2.0-cpu      # the embedded model
# Packages are those that Raydix is tested with (constraints.txt). CUDA comes with torch's wheels and the driver with the
# node, so both targets build on the same base.

# All Python that runs in the image is compiled when it is built: its processes cannot write bytecode, and would each
# compile torch, Ray and transformers at every start. The official images come without that of the standard library, pip
# compiles with one core, and files of packages may be for a newer Python. An image's sources never change, so bytecode
# is not compared with them (unchecked-hash): no copy of a layer that sets new times makes it worthless.

FROM python:3.11.14-slim-bookworm AS base
RUN python -m compileall -qq -j 0 --invalidation-mode unchecked-hash /usr/local/lib/python3.11 || true

# The same image with a C compiler, for the native CPU kernels. (The GPU image needs one at run time, see below.)
FROM python:3.11.14-bookworm AS venv
RUN python -m venv /opt/raydix
ENV PATH=/opt/raydix/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./

# torch comes first, so that a change of the sources does not reinstall its gigabytes. Without TORCH_INDEX (see
# pytorch.org, "Get Started") the CPU target contains CUDA's gigabytes, too.
FROM venv AS torch-cpu
ARG TORCH_INDEX=
RUN pip install --no-compile torch -c constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}

FROM venv AS torch-cuda
RUN pip install --no-compile torch -c constraints.txt

FROM torch-cpu AS build-cpu
COPY . .
RUN pip install --no-compile . -c constraints.txt
RUN python -m compileall -qq -j 0 --invalidation-mode unchecked-hash /opt/raydix/lib || true

FROM torch-cuda AS build-cuda
COPY . .
RUN pip install --no-compile '.[gpu]' -c constraints.txt
RUN python -m compileall -qq -j 0 --invalidation-mode unchecked-hash /opt/raydix/lib || true

FROM base AS runtime
# The user is numeric, so that Kubernetes can tell it is not root. Raydix writes to /tmp alone, so the root file system
# can be read-only.
RUN groupadd --gid 10001 raydix && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp raydix
ENV PATH=/opt/raydix/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 RAY_USAGE_STATS_ENABLED=0
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000
# Healthy: an ingress takes requests and some engine serves them. Kubernetes ignores this and has probes of its own.
HEALTHCHECK --interval=10s --timeout=9s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=8)"]
CMD ["raydix", "serve", "--host", "0.0.0.0"]

FROM runtime AS cuda
# Triton compiles a launcher in C for each kernel, at its first launch: with gcc, C's headers, Python's (the base image has
# them) and libcuda.so.1, which the node's driver brings. gcc writes to /tmp alone, and Triton to /tmp/.triton.
USER root
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER 10001:10001
# NVIDIA_VISIBLE_DEVICES is not set, because pods that ask for no GPU (head, ingress) must see none.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/raydix /opt/raydix

FROM runtime AS cpu
COPY --from=build-cpu /opt/raydix /opt/raydix
