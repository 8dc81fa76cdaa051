# An executor manager that has what rollouts need, so that no run installs anything.
FROM docker.io/xflops/flame-executor-manager:v0.6.0

# Where runs install packages, the driver's Python must have the same minor version.
ARG PYTHON_VERSION=3.12
ARG UV_DEFAULT_INDEX
ENV UV_PYTHON_INSTALL_DIR=/usr/local/flame/python

COPY constraints.txt /usr/local/flame/constraints.txt
# Flame puts this folder on every worker's path, and has its runs install from this cache.
RUN set -eu; \
    uv=/usr/local/flame/bin/uv; \
    site=/usr/local/flame/lib/python$PYTHON_VERSION/site-packages; \
    export UV_CACHE_DIR=/usr/local/flame/data/cache/uv; \
    $uv python find "$PYTHON_VERSION" || $uv python install "$PYTHON_VERSION"; \
    ln -s "$($uv python find "$PYTHON_VERSION")" /usr/local/bin/rlflame-python; \
    install="$uv pip install --python $PYTHON_VERSION --constraints /usr/local/flame/constraints.txt"; \
    $install --compile-bytecode --target "$site" flamepy numpy "gymnasium[mujoco,box2d]"; \
    $install --target /tmp/warm setuptools wheel; \
    rm -r /tmp/warm; \
    test ! -e "$site/torch"; \
    PYTHONPATH=$site $uv run --no-project --python "python$PYTHON_VERSION" \
        python -c "import flamepy, numpy, gymnasium, mujoco, Box2D"

COPY compose/executor.py /usr/local/lib/rlflame/executor.py
ENTRYPOINT ["rlflame-python", "/usr/local/lib/rlflame/executor.py"]
