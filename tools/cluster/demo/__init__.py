"""`make demo`: from an empty machine to a trained model, on the one-node cluster or on one of the user's own."""
