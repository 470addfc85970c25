"""The project's container images with docker, podman or buildah: build, check and push them. Standard library only."""
