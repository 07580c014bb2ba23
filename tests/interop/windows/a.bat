@echo off
REM it's mine
set "MODEL=Qwen/Qwen-Image"
call venv\Scripts\activate
accelerate launch train_dreambooth_lora_qwen_image.py ^
  --pretrained_model_name_or_path=%MODEL% ^
  --instance_data_dir="C:\a b"
pause