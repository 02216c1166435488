"""What serves a model: requests come in at any time, and each step of the model works on parts of many of them.

    parameters   what a request asks for, checked
    blocks       the pages of the cache: who holds which, and which hold the beginning of a text that may come again
    request      one sequence from its arrival to its end
    scheduler    which tokens of which requests a step computes
    step         the contract with what computes them: arrays in, sampled tokens out
    batch        a plan of the scheduler as these arrays
    engine       the loop: plan, run, take the results in; what a request has said so far
    text         tokens to text as they come, and strings that end it
    llm          the engine for a program: `LLM(...).generate`, `stream`, `chat`
    background   the engine in a thread of its own, for programs with an event loop
    server, …    the engine behind HTTP

All of the bookkeeping is plain Python and numpy: it is the same on every rank, and tests run it without a model.
"""
