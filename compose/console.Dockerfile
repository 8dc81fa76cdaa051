# rlflame beside the cluster, for machines that cannot reach containers by their addresses.
ARG PYTHON_VERSION=3.12
FROM docker.io/library/python:${PYTHON_VERSION}-slim

ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
COPY constraints.txt pyproject.toml README.md /opt/source/
COPY src /opt/source/src
RUN python3 -m venv /opt/rlflame \
    && /opt/rlflame/bin/pip install --no-cache-dir -c /opt/source/constraints.txt "/opt/source[plot]"
ENV PATH=/opt/rlflame/bin:$PATH
WORKDIR /work
CMD ["sleep", "infinity"]
