# One image for every role (CI does not build it): DMLC_ROLE and friends choose at run time (docs/docker.md).
#   docker build -t psgc .                                                        CPU
#   docker build -t psgc --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 .
ARG BASE=python:3.11-slim
FROM ${BASE}
# torch's own index beside PyPI, whose torch brings all of CUDA; of one version pip takes the build that this index names. TORCH: what
# constraints.txt pins, unless it is given.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH=
# The user has a name, because torch asks for it. Ubuntu's images have a user of this number.
RUN grep -q '^[^:]*:[^:]*:1000:' /etc/passwd || echo 'psgc:x:1000:1000::/home/psgc:/bin/sh' >> /etc/passwd; \
    mkdir -p /home/psgc /work && chown 1000:1000 /home/psgc /work
RUN if ! command -v python3 >/dev/null || ! python3 -m venv --help >/dev/null 2>&1; then \
      apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*; \
    fi && python3 -m venv /opt/psgc
ENV PATH=/opt/psgc/bin:$PATH PYTHONUNBUFFERED=1 NUMBA_CACHE_DIR=/opt/psgc/kernels HOME=/home/psgc
WORKDIR /src
COPY . .
RUN grep -v '^torch==' constraints.txt > /tmp/pins \
    && pip install --no-cache-dir -c /tmp/pins --extra-index-url "${TORCH_INDEX}" "${TORCH:-$(grep '^torch==' constraints.txt)}" \
    && pip install --no-cache-dir -c /tmp/pins . && rm -rf /src/* /src/.[!.]* /tmp/pins && pip uninstall --yes --quiet pip
WORKDIR /work
# For the processor that builds; readable, and open to a user who has to compile for another.
RUN psgc warm && chmod -R a+rwX /opt/psgc/kernels
USER 1000:1000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=6 CMD ["python", "-m", "psgc.launch.job.healthy"]
ENTRYPOINT ["psgc-launch"]
