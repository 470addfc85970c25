"""Pure tensor functions: tensors in, tensors out, one idea a file.

No ray, no models, no configuration objects, no random numbers. Sums over ranks are the caller's: whatever needs a
count or a moment of the whole minibatch takes it as an argument.

Dimension names in suffixes: B sequences, R response length, S whole length, T packed tokens, D hidden, V vocabulary.
"""
