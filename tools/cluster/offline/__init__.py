"""The one-node cluster on a machine without a network: `pack` here, unpack and run there."""
