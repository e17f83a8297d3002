#%Module1.0
# Written by hvdenv.
proc ModulesHelp { } {
    puts stderr "Description: Horovod 0.28.1 for tensorflow, torch 2.13.0+cpu\nRecipe: neuron+nccl\nBuilt: 2026-11-21 by ann\nPlan: ab12\n\nYour own PYTHONPATH comes before the packages of the environment: unset it.\nScripts in etc/conda/activate.d are not run; source activate.sh for that."
}
module-whatis "Description: Horovod 0.28.1 for tensorflow, torch 2.13.0+cpu"
module-whatis "Recipe: neuron+nccl"
module-whatis "Built: 2026-11-21 by ann"
module-whatis "Plan: ab12"
conflict "hvd/a"
if {[module-info mode load] && ![file isdirectory "/site/conda"]} {
    error "/site/conda is gone, or you may not enter it; `module avail hvd/a` lists other versions"
}
module use "/home/ann/b"
module use "/apps/ann/a"
source-sh bash "/apps/setup.sh"
module unload "atp"
module unload "PrgEnv-intel"
module load "PrgEnv-gnu"
module load "gcc/10.2.0"
setenv "CONDA_PREFIX" "/site/conda"
prepend-path PATH "/site/conda/bin"
setenv PYTHONNOUSERSITE 1
setenv "OPAL_PREFIX" "/g/venv"
