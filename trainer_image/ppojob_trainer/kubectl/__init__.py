"""`kubectl ppo`: manage the PPOJobs of a cluster from a user's machine.

    app.py  ── Kubectl ──▶ kubectl (contexts, credentials and proxies are its own)
      │                       get, exec, port-forward
      ├─ status_table.py, pending.py    the output: functions of the objects, no I/O
      ├─ run_folder.py                  the job's folder, by exec into its head or a pod that reads the claim
      └─ model_files.py                 the exported model, from that folder to this machine

It imports neither torch nor Ray, and changes nothing except for the purpose of a command.
"""
