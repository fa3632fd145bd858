# The server on CPUs, or on NVIDIA GPUs with --build-arg EXTRA=serve,cuda (the CUDA libraries come as
# wheels; the host needs its driver and the NVIDIA container toolkit).
#
#   docker build -t kvjax .
#   docker run --rm -p 8000:8000 -v kvjax-cache:/cache kvjax --rate 8
#   docker build -t kvjax-cuda --build-arg EXTRA=serve,cuda .
#   docker run --rm --gpus all -p 8000:8000 -v kvjax-cache:/cache -v ./weights:/weights:ro \
#       -e KVJAX_API_KEY kvjax-cuda --weights /weights --rate 8
FROM python:3.12-slim

ARG EXTRA=serve,cpu
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY kvjax kvjax
RUN pip install --no-cache-dir -c constraints.txt ".[${EXTRA}]" && rm -rf /src/*

# Weights, calibrations and compiled programs outlive the container here.
ENV KVJAX_CACHE=/cache HF_HOME=/cache/hub PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 10001 kvjax && mkdir /cache && chown kvjax /cache
USER kvjax
WORKDIR /home/kvjax
VOLUME /cache
EXPOSE 8000

# No proxy that the environment names stands before the container itself.
HEALTHCHECK --start-period=10m --interval=15s --timeout=5s CMD python -c \
    "import urllib.request as r; r.build_opener(r.ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=4)"
# SIGTERM drains. `docker stop` kills after 10 s: give it -t with more than --drain.
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvjax", "serve", "--host", "0.0.0.0"]
