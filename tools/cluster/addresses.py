"""The cluster's names and addresses, all of them. They depend on nothing of the host's own network."""

from __future__ import annotations

NODE_NAME = "ppojob-node"
CLUSTER_DOMAIN = "cluster.local"

# The pods' bridge. Its gateway address is the node's address too, so a machine without a network will do.
BRIDGE = "ppojob0"
CNI_NETWORK = "ppojob"
POD_CIDR = "10.244.0.0/24"
ALL_PODS_CIDR = "10.244.0.0/16"
NODE_IP = "10.244.0.1"
NODE_IP_WITH_PREFIX = "10.244.0.1/24"

# Fake nodes' pods get their addresses elsewhere.
FAKE_POD_CIDR = "10.250.0.0/16"

SERVICE_CIDR = "10.96.0.0/16"
API_SERVICE_IP = "10.96.0.1"

API_PORT = 6443
ETCD_PORT = 2379
ETCD_PEER_PORT = 2380
REGISTRY_PORT = 5000
REGISTRY = f"localhost:{REGISTRY_PORT}"
KUBERAY_METRICS_PORT = 18080
KUBERAY_HEALTH_PORT = 18082
COREDNS_HEALTH_PORT = 18053

# port -> who listens there. On these, every Kubernetes listens.
KUBERNETES_PORTS = {
    API_PORT: "kube-apiserver",
    10250: "kubelet",
    10257: "kube-controller-manager",
    10259: "kube-scheduler",
}
PORTS = {
    **KUBERNETES_PORTS,
    ETCD_PORT: "etcd",
    ETCD_PEER_PORT: "etcd (peers)",
    REGISTRY_PORT: "registry",
    KUBERAY_METRICS_PORT: "kuberay (metrics)",
    KUBERAY_HEALTH_PORT: "kuberay (health)",
    COREDNS_HEALTH_PORT: "coredns (health)",
}
