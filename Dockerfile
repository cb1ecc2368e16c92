# One image for every role (CI does not build it): DMLC_ROLE and friends choose at run time (docs/env.md).
#   docker build -t psgc .                                                        CPU
#   docker build -t psgc --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 --build-arg TORCH=torch .   CUDA
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG TORCH=torch
RUN if ! command -v python3 >/dev/null || ! python3 -m venv --help >/dev/null 2>&1; then \
      apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*; \
    fi && python3 -m venv /opt/psgc
ENV PATH=/opt/psgc/bin:$PATH PYTHONUNBUFFERED=1
WORKDIR /src
COPY . .
RUN grep -v '^torch==' constraints.txt > /tmp/pins && pip install --no-cache-dir -c /tmp/pins "${TORCH}" \
    && pip install --no-cache-dir -c /tmp/pins . && rm -rf /src/* /tmp/pins
WORKDIR /work
ENTRYPOINT ["psgc-launch"]
