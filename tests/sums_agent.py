"""An agent that asks the expression of its problem, and asks once more."""

import json
import os
import urllib.request

with open(os.environ["CAIRN_PROBLEM"]) as file:
    problem = json.load(file)
with open(f"{problem['folder']}/started", "a") as file:
    file.write(f"agent {os.getpid()}\n")
messages = [{"role": "user", "content": problem["prompt"]}]
for _ in range(2):
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        message = json.load(response)["choices"][0]["message"]
    messages += [message, {"role": "user", "content": problem["prompt"]}]
