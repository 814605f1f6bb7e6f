# The endpoint picker's image. What is in it is installed by tools/install, which a test runs too.
# The tag is the interpreter of both stages: the environment made in the first refers to it.
ARG PYTHON=python:3.11-slim

FROM ${PYTHON} AS install
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY requirements/image.txt requirements/build.txt requirements/
COPY tools/install tools/
COPY epp/ epp/
RUN tools/install /opt/warmroute

FROM ${PYTHON}
COPY --from=install /opt/warmroute /opt/warmroute
COPY manifests/conformance/config.yaml /etc/warmroute/conformance.yaml
# Bytecode was written when it was installed; the file system may be read-only, but for /tmp.
ENV PATH=/opt/warmroute/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
# ext-proc, health, metrics
EXPOSE 9002 9003 9090
# Flags follow, as for the field's picker, so that a chart of its takes this image.
ENTRYPOINT ["warmroute", "serve"]
