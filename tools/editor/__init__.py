"""The editor: views and changes files in the str_replace form that agents are trained on.

An edit is one plain function, `editing.apply`, which keeps no state. The execution server runs it in a child process
that has entered the sandbox with the agent's own rights: the image needs no Python, and a hostile file can harm only
the child. The server stores what undoes an edit in an `EditHistory`.

The child sees the sandbox's files, so nothing here may import a module, or a codec, late.
"""
