"""The Tinker API over Cairn's trainer and servers: adapters of many clients over one base, each call durable.

`api.py` answers HTTP, and `records.py` requests that only look; `ledger.py` keeps each call before it is
answered; `worker.py` executes the calls of each model in their order, and takes a model up again after a
crash; `sessions.py` sees which clients are there; `trainees.py` are the models, and `losses.py` what they
minimise; `helpers.py` has shares of passes computed by other processes, to which `shares.py` sends them;
`sampler.py` asks a server for samples; `wire.py` is the protocol's encoding.
"""
