# rlflame beside the cluster, for machines that cannot reach containers by their addresses. On the
# executors' own base, so that results have the same bits here as there.
FROM docker.io/xflops/flame-executor-manager:v0.6.0

ARG PYTHON_VERSION=3.12
ARG UV_DEFAULT_INDEX
# cpu leaves out what torch needs for graphics cards, which are most of the image.
ARG UV_TORCH_BACKEND
ENV UV_PYTHON_INSTALL_DIR=/usr/local/flame/python

# For rendering without a screen.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libegl1 libegl-mesa0 libgl1-mesa-dri libopengl0 \
    && rm -rf /var/lib/apt/lists/*
ENV MUJOCO_GL=egl

COPY constraints.txt pyproject.toml README.md /opt/source/
COPY src /opt/source/src
RUN set -eu; \
    uv=/usr/local/flame/bin/uv; \
    $uv python find "$PYTHON_VERSION" || $uv python install "$PYTHON_VERSION"; \
    $uv venv --python "$PYTHON_VERSION" /opt/rlflame; \
    $uv pip install --no-cache --python /opt/rlflame --constraints /opt/source/constraints.txt \
        "/opt/source[plot]"
ENV PATH=/opt/rlflame/bin:$PATH
WORKDIR /rlflame
ENTRYPOINT []
CMD ["sleep", "infinity"]
