"""The editor: views and changes files in the str_replace form that agents are trained on.

An edit is one plain function, `editing.apply`: the execution server runs it in a child process that has entered the
sandbox with the agent's own rights, so the image needs no Python and a hostile file can harm only that child. Nothing
is kept there. What an edit needs to be undone comes back in its outcome, and the server keeps it in an `EditHistory`.

The child has the server's memory but the sandbox's files, so nothing here may import a module, or a codec, late.
"""
