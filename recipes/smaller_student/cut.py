"""Make a student of a model's every third layer, or every Nth: python cut.py MODEL OUT 3

Embeddings, norms and the layers that are kept have the model's weights, so that the student does not begin
with noise.
"""

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file


def main(model: Path, out: Path, every: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, out / path.name)
    config = json.loads((model / "config.json").read_text())
    numbers = {old: new for new, old in enumerate(range(0, config["num_hidden_layers"], every))}
    config["num_hidden_layers"] = len(numbers)
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][i] for i in numbers]
    (out / "config.json").write_text(json.dumps(config, indent=2))
    kept = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            if int(parts[2]) not in numbers:
                continue
            parts[2] = str(numbers[int(parts[2])])
        kept[".".join(parts)] = tensor
    save_file(kept, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
