"""`--generate tool_python`: the model writes Python, a sandbox runs it, and the model goes on from what it printed."""
