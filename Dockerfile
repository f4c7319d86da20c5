# An image with llama-ssp and a torch for NVIDIA GPUs: `just image` builds it. For AMD's GPUs, or for CPUs alone:
# `just image --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/rocm7.2` (or `.../whl/cpu`).
FROM debian:bookworm-slim

# Triton compiles the launchers of its kernels with gcc and the headers of Python.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/llama-ssp
COPY . .
# No GPU is seen while an image is built, so the index of wheels is an argument.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cu130
RUN PIP_NO_CACHE_DIR=1 TORCH_INDEX_URL=$TORCH_INDEX_URL ./machine-install.sh \
    && .venv/bin/python -m pip install --no-cache-dir --editable '.[bitsandbytes,cpu,grammars,serve]' -c .venv/constraints.txt \
    && .venv/bin/python -m compileall -q llama_ssp launch

# Any user may run it: run folders and caches are written to /data, which is the place for a volume.
RUN mkdir --mode 1777 /data
USER 1000
WORKDIR /data
ENV PATH=/opt/llama-ssp/.venv/bin:$PATH HOME=/data LOGNAME=llama-ssp
ENTRYPOINT ["llama-ssp"]
CMD ["--help"]
