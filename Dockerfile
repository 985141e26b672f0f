# tilefit on the CPU: docker build -t tilefit . && docker run --rm -v "$PWD:/work" tilefit check train.py:build --gpu h200
# PIP_ARGS: more arguments of pip, such as an index that has PyTorch without CUDA, which makes the image a fifth as large.
FROM python:3.12-slim AS build
ARG PIP_ARGS=""
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
# hadolint ignore=DL3013,SC2086
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /dist . $PIP_ARGS

FROM python:3.12-slim
ARG PIP_ARGS=""
COPY --from=build /dist /dist
COPY constraints.txt /dist/
# hadolint ignore=DL3013,SC2086
RUN pip install --no-cache-dir -c /dist/constraints.txt $PIP_ARGS /dist/*.whl transformers torchvision timm \
    && useradd --create-home --uid 1000 tilefit
USER 1000
WORKDIR /work
ENTRYPOINT ["tilefit"]
CMD ["--help"]
