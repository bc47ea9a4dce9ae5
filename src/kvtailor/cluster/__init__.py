"""The same work on several processes and machines: what an executor is, one in this process, one on Ray."""
