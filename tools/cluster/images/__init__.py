"""The container images: bases, the operator's, the trainer's, and the pods' sandbox. buildah builds and pushes them."""
