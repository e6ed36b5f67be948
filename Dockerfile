# Two targets, one for CPUs and one for NVIDIA GPUs:
#   docker build --target cpu  -t raydix:0.2.0-cpu --build-arg TORCH_INDEX=<url of the CPU wheels> .
#   docker build --target cuda -t raydix:0.2.0-cuda .
#   docker run --rm --shm-size 2g -p 127.0.0.1:8000:8000 raydix:0.2.0-cpu      # the embedded model
# Packages have the versions with which Raydix is tested (constraints.txt). torch's wheels contain CUDA, and the node
# has the driver, so both targets build on the same base.

# The build compiles all Python of the image to bytecode, because its processes cannot write bytecode, and each would
# compile torch, Ray and transformers at every start. The official images lack the standard library's bytecode, and pip
# compiles with one core. Some files of packages are for a newer Python and fail. An image's sources never change, so
# Python need not compare bytecode with them (unchecked-hash): copies of a layer with new times keep it valid.

FROM python:3.11.14-slim-bookworm AS base
RUN python -m compileall -qq -j 0 --invalidation-mode unchecked-hash /usr/local/lib/python3.11 || true

# The same image with a C compiler, for the native CPU kernels. (The GPU image needs one at run time, see below.)
FROM python:3.11.14-bookworm AS venv
RUN python -m venv /opt/raydix
ENV PATH=/opt/raydix/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY constraints.txt ./

# torch comes first, so that a change of the sources does not reinstall its gigabytes. Without TORCH_INDEX (see
# pytorch.org, "Get Started") the CPU target also contains CUDA's gigabytes.
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
# The user is a number, so that Kubernetes can check that it is not root. Raydix writes only to /tmp, so the root file
# system can be read-only.
RUN groupadd --gid 10001 raydix && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp raydix
ENV PATH=/opt/raydix/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 RAY_USAGE_STATS_ENABLED=0
WORKDIR /tmp
USER 10001:10001
EXPOSE 8000
# Healthy: an ingress takes requests and some engine serves them. Kubernetes ignores this and uses its own probes.
HEALTHCHECK --interval=10s --timeout=9s --start-period=180s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=8)"]
CMD ["raydix", "serve", "--host", "0.0.0.0"]

FROM runtime AS cuda
# At a kernel's first launch, Triton compiles a launcher in C. This needs gcc, C's headers, Python's headers (which the
# base image has) and libcuda.so.1, which the node's driver provides. gcc writes only to /tmp, Triton to /tmp/.triton.
USER root
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
USER 10001:10001
# NVIDIA_VISIBLE_DEVICES is not set, because pods that ask for no GPU (head, ingress) must see none.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/raydix /opt/raydix

FROM runtime AS cpu
COPY --from=build-cpu /opt/raydix /opt/raydix
