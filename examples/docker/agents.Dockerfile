# What Docker sandboxes are made of: bash, git, node and python, and no agent. Build: see docs/sandboxes.md.
FROM node:22-bookworm-slim
RUN apt-get update \
 && apt-get install -y --no-install-recommends bash ca-certificates curl git jq procps python3 python3-venv ripgrep unzip \
 && rm -rf /var/lib/apt/lists/*
