"""The folders of the wheel; all else is in pyproject.toml.

Every folder below decisionllm/ is part of it, so that a new one needs no line here, and configs/ is
the package decisionllm.configs.
"""

from setuptools import find_namespace_packages, setup

CODE = find_namespace_packages(include=["decisionllm", "decisionllm.*"], exclude=["*.__pycache__"])
CONFIGS = [f"decisionllm.configs.{name}" for name in find_namespace_packages("configs")]

setup(
    packages=[*CODE, "decisionllm.configs", *CONFIGS],
    package_dir={"decisionllm": "decisionllm", "decisionllm.configs": "configs"},
    package_data={"": ["*"]},
    exclude_package_data={"": ["*.pyc"]},
    include_package_data=False,
)
