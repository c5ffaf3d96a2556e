"""One thin file per agent framework, installed as `agentspec_runtime.adapters`.

An adapter says where the code runs (session, agent, tool) by context variables. It changes no request and no
result, imports no other adapter, and is not imported by anything of the package.
"""
