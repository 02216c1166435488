"""What runs a step package: loading, process groups, state, data, the training loop. Imports nothing of the compiler.

A training run passes through the files in this order, one file per stage:

    options     what the person typed
    package     manifest.json and step.py become entry functions
    mesh        processes become named axes with their groups, and agree that they run the same code
    data        text becomes a resumable stream of (tokens, labels)
    state       initialisers become tensors
    checkpoint  state is saved whole, or not at all, and found again
    train       the loop: microbatches, finish, evaluation, signals
    schedule    the learning rate of a step
    log, plot   what the loop reports: a progress bar, JSON lines, TensorBoard events, a picture
    sample      the trained model writes text

`v1` is the one module that an emitted step.py imports. Importing this package imports nothing heavy.
"""

if __name__ != "mgraph.runtime":
    raise ImportError(f"runtime/ is imported as mgraph.runtime, not as {__name__}")
