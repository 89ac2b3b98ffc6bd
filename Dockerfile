# A peer, a router or any other ftis command, on CPUs.
#
#     docker build -t ftis:0.2.0 .
#     docker run --rm ftis:0.2.0 doctor
#
# On Linux pip's usual index has torch with CUDA, some gigabytes more. Where there is an index with the CPU build:
#
#     docker build -t ftis:0.2.0 --build-arg TORCH_INDEX_URL=… .
FROM python:3.11-slim

ARG TORCH_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1

WORKDIR /src
COPY constraints.txt ./
RUN pip install --constraint constraints.txt ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
COPY recipes ./recipes
RUN pip install --constraint constraints.txt . \
    && cp -r recipes /recipes

# Runs go to /data; keys come from /keys.
RUN useradd --uid 1000 --create-home ftis \
    && mkdir /data /keys \
    && chown ftis:ftis /data /keys
USER 1000:1000
WORKDIR /data

ENTRYPOINT ["ftis"]
CMD ["--help"]
