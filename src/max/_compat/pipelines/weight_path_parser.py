"""Weight files in another repository than the model's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["WeightPathParser"]


class WeightPathParser:
    """Splits paths of weight files into a hub repository and paths within it."""

    @staticmethod
    def parse(
        model_path: str, weight_path: Sequence[Path | str] | Path | str
    ) -> tuple[list[Path], str | None]:
        """The paths of weight files, and the repository that contains them.

        Args:
            model_path: The model's folder or name on the hub.
            weight_path: Files as local paths, paths within the model, or ``owner/repository/file``.

        Returns:
            The paths, relative to the repository if one is named; and the repository, None: the model's.

        Raises:
            ValueError: The files are in different repositories.
        """
        weight_paths = [weight_path] if isinstance(weight_path, (str, Path)) else list(weight_path)
        paths: list[Path] = []
        repositories: set[str | None] = set()
        for path in map(Path, weight_paths):
            owner_and_name, inside = path.parts[:2], path.parts[2:]
            local = path.is_absolute() or path.exists() or (Path(model_path) / path).exists()
            if local or not inside:
                repositories.add(None)
                paths.append(path)
                continue
            repository = "/".join(owner_and_name)
            repositories.add(None if repository == model_path else repository)
            paths.append(Path(*inside))
        if len(repositories) > 1:
            named = ", ".join(sorted(r or model_path for r in repositories))
            raise ValueError(f"weight_path: the files are in several repositories: {named}")
        return paths, next(iter(repositories), None)
