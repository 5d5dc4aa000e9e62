"""Starting and supervising the processes of a service, and looking at the machine they run on."""
