"""What runs a step package: loading, process groups, state, data, the training loop. Imports nothing of the compiler.

A training run passes through the files in this order, one file per stage:

    options     what the person typed
    package     manifest.json and step.py become entry functions
    mesh        processes become named axes with their groups, and agree that they run the same code
    data        text becomes a resumable stream of (tokens, labels)
    state       initialisers become tensors
    checkpoint  the newest whole checkpoint is found, and each rank reads its part
    train       the loop: microbatches, finish, evaluation, signals
    schedule    the learning rate of a step
    log, plot   what the loop reports: a progress bar, JSON lines, TensorBoard events, a picture
    saving      state is written while the loop goes on, whole or not at all
    sample      the trained model writes text

`v1` is the one module that an emitted step.py imports. Importing this package imports nothing heavy.
"""

if __name__ != "mgraph.runtime":
    raise ImportError(f"runtime/ is imported as mgraph.runtime, not as {__name__}")
