"""The Tinker API over Cairn's trainer and servers: adapters of many clients over one base, each call durable.

`api.py` answers HTTP; `ledger.py` keeps each call before it is answered; `worker.py` executes the calls of
each model in their order, and takes a model up again after a crash; `trainees.py` are the models; `sampler.py`
asks servers; `wire.py` is the protocol's encoding.
"""
