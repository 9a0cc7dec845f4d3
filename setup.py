from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
# What `make docs` and the tests of the docs need.
docs = ["pdoc>=16", "markdown-it-py>=4"]
version = (here / "visual_gen" / "version.py").read_text().split('"')[1]

setup(
    name="visual-gen",
    version=version,
    description="An attention layer for visual generation, and the Wan video model on top of it",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["attention_backend*", "visual_gen*"]),
    package_data={"visual_gen": ["checkpoints/**/*", "runtime/templates/*"]},
    python_requires=">=3.11",
    install_requires=[
        "torch>=2.11,<2.15",
        "diffusers>=0.42",
        "transformers>=5.17",
        "tokenizers>=0.22",
        # Without these two diffusers runs, but loads weights another way and cleans text another way.
        "accelerate>=1.15",
        "ftfy>=6.3",
        "safetensors>=0.8",
        "huggingface_hub>=2",
        "numpy>=2",
        "pillow>=12",
        "av>=16",
        "pydantic>=2.12",
        "pyyaml>=6",
        "rich>=14",
        "matplotlib>=3.10",
        "jinja2>=3.1",
        "markupsafe>=3",
    ],
    extras_require={
        "fa4": [
            # Every 4.x is a pre-release: without one in the bound, pip finds no version at all.
            "flash-attn-4[cu13]>=4.0.0b36; platform_system == 'Linux'",
            "nvidia-cutlass-dsl>=4.8; platform_system == 'Linux'",
            # flash-attn-4 imports it and does not declare it.
            "triton; platform_system == 'Linux'",
        ],
        "docs": docs,
        "dev": [*docs, "pytest>=9", "pytest-timeout>=2.4", "pytest-xdist>=3.8", "hypothesis>=6.150", "ruff>=0.15"],
    },
    entry_points={"console_scripts": ["visual-gen=visual_gen.cli:main"]},
)
