"""The embedded engine: a continuous-batching CPU inference server that speaks SGLang's HTTP protocol.

    python -m slime_core.engines.embedded --model-path DIR --port-file FILE

Read it in this order: request.py (the nouns), sampling.py, slot_cache.py, language_model.py (the forward over the slot
cache), batch.py (the running rows), prefill.py and scheduler.py (who runs, and one step), engine.py (the thread and the
door to it), weights.py, detokenize.py, protocol.py and server.py (SGLang's JSON over HTTP), __main__.py (the command).

In one process, without HTTP: `Engine(load_language_model(path, torch.float32))`, then start(), generate(), stop().
"""
