"""What runs a step package: loading, process groups, training loop, inference. Imports nothing of the compiler."""

if __name__ != "mgraph.runtime":
    raise ImportError(f"runtime/ is imported as mgraph.runtime, not as {__name__}")
