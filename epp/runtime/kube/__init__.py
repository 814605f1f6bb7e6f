"""The picker in a cluster: what it reads from the Kubernetes API and the little that it writes there."""
