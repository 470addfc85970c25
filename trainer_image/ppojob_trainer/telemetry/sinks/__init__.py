"""Where metrics go: one sink a file, each with `write(step, time, metrics)` and `close()`."""
